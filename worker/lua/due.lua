-- resend ms, busy resend ms, limit, night, 1 if the window is shut -> id, queue, id, queue, ...: the wakes to send now
-- Taking and postponing are one step, so two control processes never send the same wake.
local resend, busy, limit, night, shut = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
if paused() then return {} end
local t = now()
local due = redis.call('ZRANGEBYSCORE', PREFIX .. 'due', '-inf', t, 'LIMIT', 0, limit)
if not bulk_rests(night, shut) then -- what waited for that goes on, behind what is due
  local held = redis.call('ZPOPMIN', PREFIX .. 'held', limit - #due)
  for i = 1, #held, 2 do table.insert(due, held[i]) end
end
local wakes = {}
for _, id in ipairs(due) do
  local waked = tonumber(get(id, 'waked') or 0)
  local target = queue(id)
  if rests(id, night, shut) then
    hold(id, t)
  elseif waked > 0 and t - waked < busy and redis.call('LLEN', target) > 0 then
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
