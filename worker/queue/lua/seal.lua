-- bytes read, uploaded, deduplicated since the claim, then shard digest, receipt, bytes of each shard
-- -> also the attempts
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
-- As totals, because one whose answer was lost comes again, maybe with more.
local moved, any = {}, false
for i, what in ipairs({ 'read', 'uploaded', 'deduplicated' }) do
  local more = string.format('%.0f', ARGV[3 + i] - (unit(id, name, what) or 0))
  redis.call('HINCRBY', key(id), what, more)
  set_unit(id, name, what, ARGV[3 + i])
  moved[2 * i - 1], moved[2 * i], any = what, more, any or more ~= '0'
end
if any then
  local by, worker = get(id, 'asked_by') or '', process(unit(id, name, 'worker'))
  publish_at(now(), 'moved', 'job', id, 'by', by, 'worker', worker, unpack(moved))
end
if news > 0 then
  local rest = math.max(0, bytes - (unit(id, name, 'bytes') or 0)) -- what was told on the way counts no more
  came(id, name, rest, t)
  set_unit(id, name, 'bytes', 0)
  set_unit(id, name, 'attempts', 0)
end
return { 'ok', '', unit(id, name, 'attempts') }
