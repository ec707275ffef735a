-- name, run, token, number of the first entry, 1 if these are the last, the file's entries that find nothing,
-- then entry, how it ended or '' of each
-- -> 1, or 0 when the expanding is not this token's any more
local name, t = ARGV[1], now()
local base = catalog_key(name)
local state, run, token = unpack(redis.call('HMGET', base, 'state', 'run', 'expander'))
if state ~= 'expanding' or run ~= ARGV[2] or token ~= ARGV[3] then return 0 end
local number = tonumber(ARGV[4])
if number == 0 then -- somebody may have died over it before
  for _, part in ipairs({ 'entries', 'todo', 'ended', 'counts' }) do redis.call('DEL', catalog_key(name, part)) end
  redis.call('HSET', base, 'failures', 0, 'empty', ARGV[6])
end
for i = 7, #ARGV, 2 do
  redis.call('HSET', catalog_key(name, 'entries'), number, ARGV[i])
  if ARGV[i + 1] == '' then
    redis.call('ZADD', catalog_key(name, 'todo'), number, number)
  else
    redis.call('HSET', catalog_key(name, 'ended'), number, ARGV[i + 1])
    catalog_count(name, ARGV[i + 1], 1)
  end
  number = number + 1
end
if ARGV[5] == '1' then
  redis.call('HDEL', base, 'expander', 'expander_until', 'note')
  catalog_state(name, redis.call('ZCARD', catalog_key(name, 'todo')) > 0 and 'running' or 'done', t)
end
return 1
