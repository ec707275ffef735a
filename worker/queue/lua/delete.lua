-- id -> 1 if it was deleted, 0 if it was gone; a job that has not ended never is
local id = ARGV[1]
local state = get(id, 'state')
if state and not ENDED[state] then return 0 end
-- Control may not have followed its end yet, and then has other apps to tell of it (submissions.py).
local told, since = { get(id, 'callbacks'), get(id, 'published') }, tonumber(get(id, 'since') or '')
local KEPT = 7 * 86400000 -- ms
if told[1] and since and now() - since < KEPT then
  redis.call('HSET', key(id, 'callbacks'), 'callbacks', told[1], 'published', told[2] or '')
  redis.call('PEXPIRE', key(id, 'callbacks'), KEPT)
end
redis.call('DEL', key(id))
for _, part in ipairs(PARTS) do redis.call('DEL', key(id, part)) end
redis.call('DEL', key(id, 'files'))
redis.call('ZREM', PREFIX .. 'jobs', id)
redis.call('ZREM', PREFIX .. 'ids', id)
redis.call('ZREM', PREFIX .. 'held', id)
drop(id, 'due', 'waked', 'left')
for any in pairs(STATES) do redis.call('ZREM', PREFIX .. 'jobs:' .. any, id) end
return state and 1 or 0
