-- id, token, worker, lease ms, schema, hand-back ms, night, 1 if the window is shut, what is unknown of the request
-- -> {queue to wake or '', unit or '', attempts, last error, state, the dead owner's token, priority,
--     1 if the job starts, when it was asked for, by whom}
local UNITS = { plan = true, check = true, group = true, publish = true, confirm = true }
local id, token, worker, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local t = now()
local state = get(id, 'state')
local nothing = { '', '', 0, '', state or '', '', '', 0, 0, '' }
drop(id, 'waked') -- the wake that brought us here has arrived, or its record is gone and it is in nobody's way
if not state or ENDED[state] then
  drop(id, 'due', 'left')
  return nothing
end

if paused() then -- nothing is sent until it is over
  look_at(id, t)
  return nothing
end
if closed(id, ARGV[7], ARGV[8]) then
  defer(id, t)
  return nothing
end
if drained(worker) then -- it hears of it within a second, and then takes no wakes either
  look_at(id, t + tonumber(ARGV[6]))
  return nothing
end

local function leave(why)
  look_at(id, t + tonumber(ARGV[6]))
  redis.call('ZADD', queue(id) .. ':left', 'NX', t, id)
  redis.call('HSET', key(id), 'note', why)
  return nothing
end

-- What another release wrote is left to a worker that knows it.
local function leave_unknown(why)
  note_unknown(id, process(worker), true)
  return leave(why)
end

local newer = worker .. ': a newer one does it'
if ARGV[9] ~= '' then return leave_unknown('it asks for ' .. ARGV[9] .. ', unknown to ' .. newer) end
if not STATES[state] then return leave_unknown('its state is unknown to ' .. newer) end
local schema = get(id, 'schema')
if schema and schema ~= ARGV[5] then
  local ours = tonumber(schema) < tonumber(ARGV[5]) and (state == 'copying' or state == 'publishing')
  if not ours or redis.call('ZCOUNT', key(id, 'todo'), '(' .. t, '+inf') > 0 then
    local left = ours and leave or leave_unknown -- it is ours once the older release is done with its units
    return left('its plan has schema ' .. schema .. ', and ' .. worker .. ' reads ' .. ARGV[5])
  end
  drop_plan(id) -- none of the older release is at work on it, and its last worker may be gone; the receipts stay
  redis.call('ZADD', key(id, 'todo'), 0, 'plan')
  set_state(id, 'planning', t)
end

end_impossible(id, t)
local name, for_others = claimable(id, worker, t)
if not name and for_others then
  return leave('it waits for another worker than ' .. process(worker) .. ', which failed it')
end
if not name then return { settle(id, t), '', 0, '', state, '', '', 0, 0, '' } end

if not UNITS[string.match(name, '^%a+')] then return leave_unknown(name .. ' is unknown to ' .. newer) end

if unknown_to(id, process(worker)) then note_unknown(id, process(worker), false) end
local dead = unit(id, name, 'token')
if dead then event(id, 'lost', 'unit', name, 'worker', unit(id, name, 'worker') or '') end
drop(id, 'left')
set_unit(id, name, 'token', token)
set_unit(id, name, 'worker', worker)
set_unit(id, name, 'since', t)
set_unit(id, name, 'bytes', 0)
set_unit(id, name, 'waits', '')
for _, what in ipairs({ 'read', 'uploaded', 'deduplicated' }) do set_unit(id, name, what, 0) end
local attempts = redis.call('HINCRBY', key(id, 'units'), name .. '.attempts', 1)
hold(id, name, t, lease)
redis.call('HDEL', key(id), 'note')
local asked = tonumber(get(id, 'asked') or get(id, 'created'))
local starts = not get(id, 'started')
local waited = starts and { 'waited', t - asked } or {}
event(id, 'claimed', 'unit', name, 'worker', worker, 'attempt', attempts, unpack(waited))
if state == 'queued' then set_state(id, 'planning', t) end
if name == 'publish' and state == 'copying' then set_state(id, 'publishing', t) end
if starts then
  serve(id)
  redis.call('HSET', key(id), 'started', t)
end
if string.match(name, '^group') then -- its bytes take the time from now on
  forget_pace(id, name)
  came(id, name, 0, t)
end
return { settle(id, t), name, attempts, unit(id, name, 'error') or '', get(id, 'state'), dead or '',
  get(id, 'priority'), starts and 1 or 0, asked, get(id, 'asked_by') or '' }
