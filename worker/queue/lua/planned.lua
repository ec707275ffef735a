-- schema, digest, head, groups, notes, bytes to upload, outline, then digest, size, shard of each shard
-- The plan is written once: by whoever holds the job's planning, and never again under another one's units.
if name ~= 'plan' then return { 'lost', '' } end
local shards, bytes, sealed, sealed_bytes = 0, 0, 0, 0
redis.call('HSET', key(id, 'plan'), 'head', ARGV[6])
redis.call('SET', key(id, 'files'), ARGV[10])
for i = 11, #ARGV, 3 do
  redis.call('HSET', key(id, 'plan'), shards, ARGV[i + 2])
  shards, bytes = shards + 1, bytes + tonumber(ARGV[i + 1])
  if redis.call('HEXISTS', key(id, 'receipts'), ARGV[i]) == 1 then
    sealed, sealed_bytes = sealed + 1, sealed_bytes + tonumber(ARGV[i + 1])
  end
end
redis.call('HSET', key(id), 'schema', ARGV[4], 'digest', ARGV[5], 'notes', ARGV[8], 'expected', ARGV[9], 'shards', shards,
  'bytes', string.format('%.0f', bytes), 'shards_sealed', sealed, 'bytes_sealed', string.format('%.0f', sealed_bytes))

unit_done(id, name, token, t)
redis.call('ZADD', key(id, 'todo'), 0, 'check')
for group = 0, tonumber(ARGV[7]) - 1 do
  redis.call('ZADD', key(id, 'todo'), 0, string.format('group:%05d', group))
end
set_state(id, 'copying', t)
return { 'ok', settle(id, t) }
