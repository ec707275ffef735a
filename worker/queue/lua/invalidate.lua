-- copies, error, number of groups, those groups, then shard digest, bytes of each shard -> also 'often'
-- These receipts are worth nothing: the store lost what they say it holds, or it was copied from bad bytes. The groups
-- that are named are copied again, and a publication that waited for them starts over. When one unit has met this as
-- often as there may be copies, it is not to be tried again: a group's receipts still go, or a retry would trust them; a
-- publication, which would ask for them anew, leaves all as it is. Without shards and groups it is only counted.
local groups = tonumber(ARGV[6])
local often = redis.call('HINCRBY', key(id, 'units'), name .. '.voids', 1) >= tonumber(ARGV[4])
if often and groups > 0 then return { 'often', '' } end

for i = 7 + groups, #ARGV, 2 do
  if redis.call('HDEL', key(id, 'receipts'), ARGV[i]) == 1 then
    redis.call('HINCRBY', key(id), 'bytes_sealed', string.format('%.0f', -tonumber(ARGV[i + 1])))
    redis.call('HINCRBY', key(id), 'shards_sealed', -1)
  end
end
redis.call('HSET', key(id), 'last_error', ARGV[5])
if #ARGV > 6 then event(id, 'voided', 'unit', name, 'error', ARGV[5]) end
if groups == 0 then return { often and 'often' or 'ok', '' } end

free(id, name, 0)
redis.call('ZREM', key(id, 'todo'), name)
for i = 7, 6 + groups do
  redis.call('HDEL', key(id, 'attested'), ARGV[i])
  redis.call('HDEL', key(id, 'units'), ARGV[i] .. '.done_by', ARGV[i] .. '.attempts')
  redis.call('ZADD', key(id, 'todo'), 0, ARGV[i])
end
set_state(id, 'copying', t)
return { 'ok', settle(id, t) }
