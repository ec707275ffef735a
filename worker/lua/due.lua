-- resend ms, busy resend ms, limit -> id, queue, id, queue, ...: the wakes to send now
-- Taking and postponing are one step, so two control processes never send the same wake.
local resend, busy, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local t = now()
local wakes = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'due', '-inf', t, 'LIMIT', 0, limit)) do
  local waked = tonumber(get(id, 'waked') or 0)
  local target = queue(id)
  if waked > 0 and t - waked < busy and redis.call('LLEN', target) > 0 then
    redis.call('ZADD', PREFIX .. 'due', t + resend, id) -- it stands in line; another copy of it would not help
  else
    redis.call('HDEL', key(id), 'waked')
    if settle(id, t, resend) ~= '' then
      table.insert(wakes, id)
      table.insert(wakes, target)
    end
  end
end
return wakes
