-- bytes read, uploaded, deduplicated, then shard digest, receipt, bytes of each shard -> also the attempts
-- New receipts are lasting progress: the attempts before them are forgiven.
local news, bytes = 0, 0
for i = 7, #ARGV, 3 do
  if redis.call('HSETNX', key(id, 'receipts'), ARGV[i], ARGV[i + 1]) == 1 then
    news, bytes = news + 1, bytes + tonumber(ARGV[i + 2])
    redis.call('HINCRBY', key(id), 'bytes_sealed', ARGV[i + 2])
    redis.call('HINCRBY', key(id), 'shards_sealed', 1)
    event(id, 'sealed', 'unit', name, 'shard', ARGV[i], 'bytes', ARGV[i + 2])
  end
end
if news > 0 or #ARGV < 7 then -- and not the second answer to one question
  for i, what in ipairs({ 'read', 'uploaded', 'deduplicated' }) do redis.call('HINCRBY', key(id), what, ARGV[3 + i]) end
  publish_at(now(), 'moved', 'job', id, 'by', get(id, 'asked_by') or '', 'worker', process(unit(id, name, 'worker')), 'read', ARGV[4], 'uploaded', ARGV[5],
    'deduplicated', ARGV[6])
end
if news > 0 then
  local rest = math.max(0, bytes - (unit(id, name, 'bytes') or 0)) -- what was told on the way counts no more
  came(id, name, rest, t)
  set_unit(id, name, 'bytes', 0)
  set_unit(id, name, 'attempts', 0)
end
return { 'ok', '', unit(id, name, 'attempts') }
