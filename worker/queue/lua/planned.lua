-- id, token, schema, digest, head, groups, notes, bytes to upload, then digest, size, shard of each shard
-- -> {'ok' | 'lost' | 'cancelled', queue to wake}
-- The plan is written once: by whoever holds the job's planning, and never again under another one's units.
local id, token = ARGV[1], ARGV[2]
local t = now()
if get(id, 'state') == 'cancelled' then return { 'cancelled', '' } end
if not owns(id, 'plan', token) then
  local mine = unit(id, 'plan', 'done_by') == token
  return { mine and 'ok' or 'lost', mine and settle(id, t) or '' }
end

local shards, bytes, sealed, sealed_bytes = 0, 0, 0, 0
redis.call('HSET', key(id, 'plan'), 'head', ARGV[5])
for i = 9, #ARGV, 3 do
  redis.call('HSET', key(id, 'plan'), shards, ARGV[i + 2])
  shards, bytes = shards + 1, bytes + tonumber(ARGV[i + 1])
  if redis.call('HEXISTS', key(id, 'receipts'), ARGV[i]) == 1 then
    sealed, sealed_bytes = sealed + 1, sealed_bytes + tonumber(ARGV[i + 1])
  end
end
redis.call('HSET', key(id), 'schema', ARGV[3], 'digest', ARGV[4], 'notes', ARGV[7], 'expected', ARGV[8], 'shards', shards,
  'bytes', string.format('%.0f', bytes), 'shards_sealed', sealed, 'bytes_sealed', string.format('%.0f', sealed_bytes))

redis.call('ZREM', key(id, 'todo'), 'plan')
redis.call('HDEL', key(id, 'units'), 'plan.token')
set_unit(id, 'plan', 'done_by', token)
event(id, 'finished', 'unit', 'plan', 'took', t - (unit(id, 'plan', 'since') or t))
redis.call('ZADD', key(id, 'todo'), 0, 'check')
for group = 0, tonumber(ARGV[6]) - 1 do
  redis.call('ZADD', key(id, 'todo'), 0, string.format('group:%05d', group))
end
set_state(id, 'copying', t)
return { 'ok', settle(id, t) }
