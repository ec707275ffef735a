-- id, the commit that undoes the job's -> 1 if the job is still there to keep it
local id, commit = ARGV[1], ARGV[2]
if redis.call('EXISTS', key(id)) == 0 then return 0 end
redis.call('HSET', key(id), 'undone', commit)
return 1
