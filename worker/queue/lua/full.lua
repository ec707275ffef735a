-- who, how many jobs one submitter may have queued -> the oldest of who has so many, or ''
return oldest_of_full(ARGV[1], tonumber(ARGV[2])) or ''
