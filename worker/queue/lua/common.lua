-- What every step shares; scripts.py puts this file before each of the others, and before it ENDED, from states.py.
-- Times are milliseconds of this server's clock, the only clock that decides anything.
--
-- A job is a hash, and beside it:
--   :todo      sorted set: unit of work -> when it may be claimed. A lease, a backoff and "now" are all just a time.
--   :units     hash: <unit>.token, .worker, .attempts, .bytes, ... of every unit
--   :plan      hash: head, and one field per shard
--   :receipts  hash: shard digest -> receipt
--   :attested  hash: group -> what attests its bytes
--   :events    stream, for who watches
--
-- Until it ends, a job is in one of these, or in `held` (fleet.py), or nobody would look at it again:
--   <queue>:due    sorted set: job -> when to look at it
--   <queue>:waked  sorted set: job whose wake is in line, or was lost -> when it was sent

local PREFIX = 'reshard:'
local QUEUES = { PREFIX .. 'interactive', PREFIX .. 'started', PREFIX .. 'bulk' } -- in the order that workers serve
local PARTS = { 'todo', 'units', 'plan', 'receipts', 'attested', 'events' }

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function key(id, part)
  local base = PREFIX .. 'job:' .. id
  return part and (base .. ':' .. part) or base
end

local function get(id, field)
  return redis.call('HGET', key(id), field)
end

local function unit(id, name, field)
  return redis.call('HGET', key(id, 'units'), name .. '.' .. field)
end

local function set_unit(id, name, field, value)
  redis.call('HSET', key(id, 'units'), name .. '.' .. field, value)
end

-- What happens is appended in the step in which it happens: to the one stream that followers live from (events.py),
-- and to the job's own, so that whoever watches one job need not read of all. After so many the oldest go.
local ALL_MAX, JOB_MAX = 100000, 1000

local function publish(kind, ...)
  redis.call('XADD', PREFIX .. 'events', 'MAXLEN', '~', ALL_MAX, '*', 'kind', kind, 'at', now(), ...)
end

local function event(id, kind, ...)
  redis.call('XADD', key(id, 'events'), 'MAXLEN', '~', JOB_MAX, '*', 'kind', kind, 'at', now(), ...)
  publish(kind, 'job', id, ...)
end

-- Control hears it, and looks at once at what is due and at what has happened.
local function bell(id)
  redis.call('LPUSH', PREFIX .. 'bell', id)
  redis.call('LTRIM', PREFIX .. 'bell', 0, 999)
end

local function set_state(id, state, t)
  local before = get(id, 'state')
  if before == state then return end
  if before then redis.call('ZREM', PREFIX .. 'jobs:' .. before, id) end
  redis.call('HSET', key(id), 'state', state, 'since', t)
  redis.call('ZADD', PREFIX .. 'jobs:' .. state, t, id)
  event(id, 'state', 'state', state)
end

-- A unit belongs to the latest token that claimed it, expired or not, until it is done.
local function owns(id, name, token)
  return unit(id, name, 'token') == token and redis.call('ZSCORE', key(id, 'todo'), name)
end

local function drop(id, list)
  for _, line in ipairs(QUEUES) do redis.call('ZREM', line .. ':' .. list, id) end
end

local function free(id, name, at)
  redis.call('HDEL', key(id, 'units'), name .. '.token', name .. '.worker', name .. '.bytes')
  redis.call('ZADD', key(id, 'todo'), at, name)
end

local function free_all(id)
  for _, name in ipairs(redis.call('ZRANGE', key(id, 'todo'), 0, -1)) do free(id, name, 0) end
end

local function drop_plan(id)
  redis.call('DEL', key(id, 'plan'), key(id, 'attested'), key(id, 'todo'), key(id, 'units'))
  redis.call('HDEL', key(id), 'schema', 'digest')
end

-- The queue that a job's wakes go to. A bulk job that has begun goes before those that have not, so that jobs end
-- one after the other instead of all at the end.
local function queue(id)
  if get(id, 'priority') == 'interactive' then return PREFIX .. 'interactive' end
  return PREFIX .. (get(id, 'state') == 'queued' and 'bulk' or 'started')
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

-- What operators said to all workers (fleet.py). A process is a worker without its child's number.
local FLEET = PREFIX .. 'fleet'

local function paused()
  return redis.call('HEXISTS', FLEET, 'paused') == 1
end

local function drained(worker)
  return redis.call('HEXISTS', FLEET .. ':drained', string.match(worker, '^(.*)%.%d+$') or worker) == 1
end

-- `night` is when the night began, `shut` is 1 outside of the window; both by whoever knows time zones.
local function bulk_rests(night, shut)
  if tonumber(shut) == 1 then return true end
  local most = redis.call('HGET', FLEET, 'night_bytes')
  return most and tonumber(redis.call('GET', FLEET .. ':night:' .. night) or 0) >= tonumber(most)
end

-- Whether this job is to wait. One whose commit was begun is carried to its end.
local function rests(id, night, shut)
  local state = get(id, 'state')
  if get(id, 'priority') ~= 'bulk' or state == 'committing' or state == 'confirming' then return false end
  return bulk_rests(night, shut)
end

-- It waits beside what is due, so that what is due is not looked for behind thousands that are not.
local function hold(id, t)
  drop(id, 'waked')
  drop(id, 'due')
  redis.call('ZADD', PREFIX .. 'held', 'NX', t, id)
end

-- Looks at what is left of a job, notes when to look again, and returns the queue to send a wake to, or ''.
-- A wake that is on its way is not doubled; one that got lost is sent again by `due`.
local function settle(id, t)
  local first = redis.call('ZRANGE', key(id, 'todo'), 0, 0, 'WITHSCORES')
  if #first == 0 or ENDED[get(id, 'state')] then
    drop(id, 'due')
    drop(id, 'waked')
    return ''
  end
  local at = tonumber(first[2])
  if at > t then
    look_at(id, at)
    return ''
  end
  drop(id, 'due')
  if waked(id) then return '' end
  redis.call('ZADD', queue(id) .. ':waked', t, id)
  return queue(id)
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
  drop(id, 'due')
  drop(id, 'waked')
  redis.call('ZREM', PREFIX .. 'held', id)
  local target = get(id, 'target')
  if redis.call('HGET', PREFIX .. 'active', target) == id then redis.call('HDEL', PREFIX .. 'active', target) end
  publish('ended', 'job', id, 'state', state, 'error', get(id, 'error') or '')
  bell(id)
end

-- A job that was carried to its end needs its details only for who is still watching.
local function complete(id, t, keep)
  finish(id, 'done', t)
  for _, part in ipairs(PARTS) do redis.call('PEXPIRE', key(id, part), keep) end
end
