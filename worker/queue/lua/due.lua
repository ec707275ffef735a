-- resend ms, limit, night, 1 if the window is shut, lease ms -> id, queue, id, queue, ...: the wakes to send now
-- Taking and postponing are one step, so two control processes never send the same wake.
local resend, limit, night, shut = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
if paused() then return {} end
local t = now()
local wakes = {}

local function left()
  return limit - #wakes / 2
end

local function look(ids)
  for _, id in ipairs(ids) do
    if not readable(id) then -- it holds up no other; `stray` tells of it
      drop(id, 'due', 'waked', 'left')
    elseif closed(id, night, shut) then
      defer(id, t)
    else
      local line = settle(id, t)
      if line ~= '' then
        table.insert(wakes, id)
        table.insert(wakes, line)
      end
    end
  end
end

-- A wake is lost when its line is too short for it: counted before this look adds some that are still to be sent.
local missing = {}
for _, line in ipairs(QUEUES) do
  missing[line] = redis.call('ZCARD', line .. ':waked') - redis.call('LLEN', line)
end
for _, line in ipairs(QUEUES) do
  look(redis.call('ZRANGEBYSCORE', line .. ':due', '-inf', t, 'LIMIT', 0, left()))
  -- Due in more than a lease: a backoff, or this server's clock jumped back and it is to be noted anew.
  local far = '(' .. t + ARGV[5] + SLACK
  local later = redis.call('ZREVRANGEBYSCORE', line .. ':due', '+inf', far, 'WITHSCORES', 'LIMIT', 0, left())
  for i = 1, #later, 2 do
    -- Many wait like this, so what steps cannot read is found by the error, and `look` drops it.
    local read = pcall(end_impossible, later[i], t)
    local first = read and redis.call('ZRANGE', key(later[i], 'todo'), 0, 0, 'WITHSCORES') or {}
    if first[2] ~= later[i + 1] then look({ later[i] }) end
  end
  for _, sent in ipairs({ { '-inf', t - resend }, { t + SLACK, '+inf' } }) do -- or before the clock jumped back
    local lost = math.min(left(), missing[line])
    if lost > 0 then -- the oldest, as a line is served in order
      local ids = redis.call('ZRANGEBYSCORE', line .. ':waked', sent[1], sent[2], 'LIMIT', 0, lost)
      for _, id in ipairs(ids) do drop(id, 'waked') end
      look(ids)
      missing[line] = missing[line] - #ids
    end
  end
end
if left() > 0 and not bulk_closed(night, shut) then -- what waited for that goes on, behind what is due
  local held = redis.call('ZPOPMIN', PREFIX .. 'held', left())
  local ids = {}
  for i = 1, #held, 2 do table.insert(ids, held[i]) end
  look(ids)
end
return wakes
