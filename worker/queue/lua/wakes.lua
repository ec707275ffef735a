-- What wakes a worker (wakes.py tells it in full); scripts.py puts this file after common.lua, before each step.
--
-- Until it ends, a job is in one of these, or in `held`, or nobody would look at it again:
--   <queue>:due    sorted set: job -> when to look at it
--   <queue>:waked  sorted set: job whose wake is in line, or was lost -> when it was sent
-- and while it is in the second also in
--   <queue>:order  sorted set: job -> its rank; a wake is for the first, whichever job it was sent for
-- What workers leave to others is also in
--   <queue>:left   sorted set: job -> since when, until a worker claims one of its units

local QUEUES = { PREFIX .. 'interactive', PREFIX .. 'bulk' } -- in the order that workers serve

local function drop(id, ...)
  for _, line in ipairs(QUEUES) do
    for _, list in ipairs({ ... }) do
      redis.call('ZREM', line .. ':' .. list, id)
      if list == 'waked' then redis.call('ZREM', line .. ':order', id) end
    end
  end
end

-- The queue that a job's wakes go to.
local function queue(id)
  return PREFIX .. (get(id, 'priority') == 'interactive' and 'interactive' or 'bulk')
end

-- The order of work within a queue: what has begun since its submit or its last retry goes before what has not, so that
-- jobs end one after the other instead of all at the end, and among these goes first whose turn came first.
local function rank(id)
  return (number(key(id), 'turn') or 0) + (get(id, 'started') and 0 or NOT_BEGUN)
end

-- The jobs of its submitter that have a turn in its line and have not begun: job -> turn.
local function waiting(id)
  return sorted(queue(id) .. ':waiting:' .. (get(id, 'asked_by') or ''))
end

-- Submitters take turns: the next one of each comes a step behind their last that still waits, or behind what is begun
-- now if that is further on; a step is the shorter the larger the share. Of equal turns the older one is first.
local STEP, OLDER = 64, 2 ^ 20
local function take_turn(id)
  local line, who, turn = waiting(id), get(id, 'asked_by') or '', tonumber(redis.call('GET', queue(id) .. ':serves') or 0)
  local last = redis.call('ZREVRANGE', line, 0, 0, 'WITHSCORES')
  while last[1] do
    local state = get(last[1], 'state')
    if state and not ENDED[state] and not get(last[1], 'started') then break end
    redis.call('ZREM', line, last[1]) -- it waits no more, or a client removed its record
    last = redis.call('ZREVRANGE', line, 0, 0, 'WITHSCORES')
  end
  turn = math.max(turn, tonumber(last[2] or 0))
  local share = number(PREFIX .. 'shares', who) or 1
  turn = turn + math.max(1, math.floor(STEP / (share > 0 and share or 1) + 0.5))
  redis.call('HSET', key(id), 'turn', string.format('%.0f', turn * OLDER + redis.call('INCR', PREFIX .. 'last_turn') % OLDER))
  redis.call('ZADD', line, turn, id)
end

-- It is begun: who comes from now on has a turn behind it.
local function serve(id)
  redis.call('ZREM', waiting(id), id)
  local serves, turn = queue(id) .. ':serves', math.floor((number(key(id), 'turn') or 0) / OLDER)
  if turn > tonumber(redis.call('GET', serves) or 0) then redis.call('SET', serves, turn) end
end

-- Whether steps can read the job; a client may have written over one of its keys.
local function readable(id)
  for name, kind in pairs({ [key(id)] = 'hash', [key(id, 'units')] = 'hash', [key(id, 'todo')] = 'zset' }) do
    local found = redis.call('TYPE', name).ok
    if found ~= kind and found ~= 'none' then return false end
  end
  return true
end

local function look_at(id, t)
  drop(id, 'due')
  redis.call('ZADD', queue(id) .. ':due', t, id)
end

local function waked(id)
  for _, line in ipairs(QUEUES) do
    if redis.call('ZSCORE', line .. ':waked', id) then return true end
  end
  return false
end

-- Control hears it, and looks at once at what is due and at what has happened.
local function bell(id)
  redis.call('LPUSH', PREFIX .. 'bell', id)
  redis.call('LTRIM', PREFIX .. 'bell', 0, 999)
end

-- What operators said to all workers (fleet.py). A process is a worker without its child's number.
local FLEET = PREFIX .. 'fleet'

local function paused()
  return redis.call('HEXISTS', FLEET, 'paused') == 1
end

local function process(worker)
  return string.match(worker, '^(.*)%.%d+$') or worker
end

local function drained(worker)
  return redis.call('HEXISTS', FLEET .. ':drained', process(worker)) == 1
end

-- Whether this worker failed the unit for a cause of its own: a full disk, a bad token.
local function failed(id, name, worker)
  local by = unit(id, name, 'failed_by')
  return by and string.find(by, ' ' .. process(worker) .. ' ', 1, true) ~= nil
end

-- Whether a worker rests by itself that would fail with the same error, or that nobody repairs.
local PATIENCE = 600000 -- ms; twice the longest pause between two tries of a resting worker
local function no_help(worker, code)
  local resting = redis.call('HGET', FLEET .. ':resting', worker)
  if not resting then return false end
  local fault = cjson.decode(resting)
  return fault.code == code or math.abs(now() - fault.since * 1000) > PATIENCE
end

-- Whether a worker takes no wakes from this queue, as it said when it was alive last; an older release's takes all.
local function leaves_out(worker, line)
  local known = redis.call('GET', PREFIX .. 'process:' .. worker)
  local taken = known and cjson.decode(known).queues
  if type(taken) ~= 'table' then return false end
  for _, name in ipairs(taken) do
    if PREFIX .. name == line then return false end
  end
  return true
end

-- Which live workers left the job to another release; a claim takes its worker out of them, and a retry all.
local function unknown_to(id, worker)
  return string.find(get(id, 'unknown_to') or '', ' ' .. worker .. ' ', 1, true) ~= nil
end

local function note_unknown(id, worker, is)
  local kept = is and ' ' .. worker .. ' ' or ' '
  for other in string.gmatch(get(id, 'unknown_to') or '', '%S+') do
    if other ~= worker and redis.call('EXISTS', PREFIX .. 'process:' .. other) == 1 then kept = kept .. other .. ' ' end
  end
  redis.call('HSET', key(id), 'unknown_to', kept)
end

-- Whether a worker is alive that did not fail the unit with `failure`, is not drained, and may yet do it.
local function others(id, name, failure)
  local code = failure and cjson.decode(failure).code
  for _, worker in ipairs(redis.call('SMEMBERS', PREFIX .. 'processes')) do
    local known = redis.call('GET', PREFIX .. 'process:' .. worker)
    if known and cjson.decode(known).kind == 'worker' and not drained(worker) and not failed(id, name, worker)
        and not no_help(worker, code) and not leaves_out(worker, queue(id)) and not unknown_to(id, worker) then
      return true
    end
  end
  return false
end

-- The first unit whose time has come, and whether there are some that only other workers may have.
local function claimable(id, worker, t)
  local first = redis.call('ZRANGEBYSCORE', key(id, 'todo'), '-inf', t, 'LIMIT', 0, 1)[1]
  if not first or not failed(id, first, worker) then return first, false end
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key(id, 'todo'), '-inf', t)) do
    if not failed(id, name, worker) or not others(id, name, unit(id, name, 'error')) then return name, true end
  end
  return nil, true
end

-- `night` is when the night began, `shut` is 1 outside of the window; both by whoever knows time zones.
local function bulk_closed(night, shut)
  if tonumber(shut) == 1 then return true end
  local most = redis.call('HGET', FLEET, 'night_bytes')
  return most and tonumber(redis.call('GET', FLEET .. ':night:' .. night) or 0) >= tonumber(most)
end

-- Whether this job is to wait. One whose commit was begun is carried to its end.
local function closed(id, night, shut)
  return get(id, 'priority') == 'bulk' and CANCELLABLE[get(id, 'state')] and bulk_closed(night, shut)
end

-- It waits beside what is due, so that what is due is not looked for behind thousands that are not.
local function defer(id, t)
  drop(id, 'due', 'waked', 'left')
  redis.call('ZADD', PREFIX .. 'held', 'NX', t, id)
end

-- Looks at what is left of a job, notes when to look again, and returns the queue to send a wake to, or ''.
-- A wake that is on its way is not doubled; one that got lost is sent again by `due`.
local function settle(id, t)
  end_impossible(id, t)
  local first, state = redis.call('ZRANGE', key(id, 'todo'), 0, 0, 'WITHSCORES'), get(id, 'state')
  if #first == 0 or not state or ENDED[state] then -- or a client removed its record
    drop(id, 'due', 'waked', 'left')
    return ''
  end
  local at = tonumber(first[2])
  if at > t then
    look_at(id, at)
    return ''
  end
  drop(id, 'due')
  if waked(id) then return '' end
  local line = queue(id)
  redis.call('ZADD', line .. ':waked', t, id)
  redis.call('ZADD', line .. ':order', rank(id), id)
  return line
end

-- The same for a caller who cannot send: the control process hears the bell and sends.
local function ring(id, t)
  drop(id, 'waked')
  look_at(id, t)
  bell(id)
end

local function finish(id, state, t)
  free_all(id)
  set_state(id, state, t)
  drop(id, 'due', 'waked', 'left')
  redis.call('ZREM', PREFIX .. 'held', id)
  redis.call('ZREM', waiting(id), id)
  local target = get(id, 'target')
  if redis.call('HGET', PREFIX .. 'active', target) == id then redis.call('HDEL', PREFIX .. 'active', target) end
  local started = get(id, 'started')
  publish_at(t, 'ended', 'job', id, 'state', state, 'error', get(id, 'error') or '', 'took', started and t - started or '',
    'asked', get(id, 'asked') or get(id, 'created'), 'by', get(id, 'asked_by') or '')
  bell(id)
end

-- A job that was carried to its end needs its details only for who is still watching.
local function complete(id, t, keep)
  local mean, bytes = number(PACE, 'mean'), number(key(id), 'bytes') or 0
  redis.call('HSET', PACE, 'mean', string.format('%.0f', mean and 0.9 * mean + 0.1 * bytes or bytes)) -- of a job
  finish(id, 'done', t)
  for _, part in ipairs(PARTS) do redis.call('PEXPIRE', key(id, part), keep) end
end
