-- id, token, worker, lease ms, schema, hand-back ms, night, 1 if the window is shut
-- -> {queue to wake or '', unit or '', attempts, last error, state, the dead owner's token, priority}
local id, token, worker, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local t = now()
local state = get(id, 'state')
local nothing = { '', '', 0, '', state or '', '', '' }
if not state or ENDED[state] then
  drop(id, 'due')
  return nothing
end
drop(id, 'waked') -- the wake that brought us here has arrived

if paused() then -- nothing is sent until it is over
  look_at(id, t)
  return nothing
end
if rests(id, ARGV[7], ARGV[8]) then
  defer(id, t)
  return nothing
end
if drained(worker) then -- it hears of it within a second, and then takes no wakes either
  look_at(id, t + tonumber(ARGV[6]))
  return nothing
end

local schema = get(id, 'schema')
if schema and schema ~= ARGV[5] then -- another version's plan: leave it to a worker who reads it
  look_at(id, t + tonumber(ARGV[6]))
  redis.call('HSET', key(id), 'note', 'its plan has schema ' .. schema .. ', and ' .. worker .. ' reads ' .. ARGV[5])
  return nothing
end

local name, for_others = claimable(id, worker, t)
if not name and for_others then
  look_at(id, t + tonumber(ARGV[6]))
  redis.call('HSET', key(id), 'note', 'it waits for another worker than ' .. process(worker) .. ', which failed it')
  return nothing
end
if not name then return { settle(id, t), '', 0, '', state, '', '' } end

local dead = unit(id, name, 'token')
if dead then event(id, 'lost', 'unit', name, 'worker', unit(id, name, 'worker') or '') end
set_unit(id, name, 'token', token)
set_unit(id, name, 'worker', worker)
set_unit(id, name, 'since', t)
set_unit(id, name, 'bytes', 0)
local attempts = redis.call('HINCRBY', key(id, 'units'), name .. '.attempts', 1)
redis.call('ZADD', key(id, 'todo'), t + lease, name)
redis.call('HDEL', key(id), 'note')
event(id, 'claimed', 'unit', name, 'worker', worker, 'attempt', attempts)
if state == 'queued' then set_state(id, 'planning', t) end
if name == 'publish' and state == 'copying' then set_state(id, 'publishing', t) end
return { settle(id, t), name, attempts, unit(id, name, 'error') or '', get(id, 'state'), dead or '',
  get(id, 'priority') }
