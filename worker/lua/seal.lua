-- id, unit, token, then shard digest, receipt, bytes of each shard -> 'ok' | 'lost' | 'cancelled'
-- Receipts are lasting progress: the attempts before them are forgiven.
local id, name, token = ARGV[1], ARGV[2], ARGV[3]
if get(id, 'state') == 'cancelled' then return 'cancelled' end
if not owns(id, name, token) then return 'lost' end
for i = 4, #ARGV, 3 do
  if redis.call('HSETNX', key(id, 'receipts'), ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('HINCRBY', key(id), 'bytes_sealed', ARGV[i + 2])
    redis.call('HINCRBY', key(id), 'shards_sealed', 1)
    event(id, 'sealed', 'unit', name, 'shard', ARGV[i], 'bytes', ARGV[i + 2])
  end
end
set_unit(id, name, 'attempts', 0)
set_unit(id, name, 'bytes', 0)
return 'ok'
