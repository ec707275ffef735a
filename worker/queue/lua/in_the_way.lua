-- target, key, who, how many jobs one submitter may have queued
-- -> {'' | 'same' | 'busy' | 'full', the job that does the same, that has the target, or that is the submitter's oldest}
local active = redis.call('HGET', PREFIX .. 'active', ARGV[1])
if active and get(active, 'state') then -- or a client removed its record, or wrote over it
  return { get(active, 'key') == ARGV[2] and 'same' or 'busy', active }
end
local oldest = oldest_of_full(ARGV[3], tonumber(ARGV[4]))
return { oldest and 'full' or '', oldest or '' }
