-- id -> 1 if it was deleted, 0 if it was gone; a job that has not ended never is
local id = ARGV[1]
local state = get(id, 'state')
if state and not ENDED[state] then return 0 end
redis.call('DEL', key(id))
for _, part in ipairs(PARTS) do redis.call('DEL', key(id, part)) end
redis.call('DEL', key(id, 'files'))
redis.call('ZREM', PREFIX .. 'jobs', id)
redis.call('ZREM', PREFIX .. 'ids', id)
drop(id, 'due')
for ended in pairs(ENDED) do redis.call('ZREM', PREFIX .. 'jobs:' .. ended, id) end
return state and 1 or 0
