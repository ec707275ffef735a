-- What every step shares; scripts.py puts this file before each of the others, and before it STATES, ENDED and
-- CANCELLABLE, from states.py.
-- Times are milliseconds of this server's clock, the only clock that decides anything.
--
-- A job is a hash, and beside it:
--   :todo      sorted set: unit of work -> when it may be claimed. A lease, a backoff and "now" are all just a time.
--   :units     hash: <unit>.token, .worker, .attempts, .bytes, ... of every unit
--   :plan      hash: head, and one field per shard
--   :receipts  hash: shard digest -> receipt
--   :attested  hash: group -> what attests its bytes
--   :events    stream, for who watches
--   :log       list of the last lines that its workers logged
--   :files     what the plan said of its files, which stays as long as the job does
--   :callbacks hash: what a job that was deleted soon after its end still has to tell other apps (submissions.py)

local PREFIX = 'reshard:'
local PARTS = { 'todo', 'units', 'plan', 'receipts', 'attested', 'events', 'log' }

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function key(id, part)
  local base = PREFIX .. 'job:' .. id
  return part and (base .. ':' .. part) or base
end

-- A record that a client wrote over has no fields.
local function get(id, field)
  local found = redis.pcall('HGET', key(id), field)
  return type(found) ~= 'table' and found
end

-- A number of a hash; nothing where there is none that can be counted with, as a client may write anything there.
local function number(hash, field)
  local found = tonumber(redis.pcall('HGET', hash, field) or '')
  return found and math.abs(found) < 2 ^ 53 and found or nil
end

-- A sorted set by this name; what a client wrote there goes.
local function sorted(name)
  local kind = redis.call('TYPE', name).ok
  if kind ~= 'zset' and kind ~= 'none' then redis.call('DEL', name) end
  return name
end

-- The queued jobs of one submitter, the oldest first.
local function queued_by(who)
  return sorted(PREFIX .. 'queued:' .. who)
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

-- Clients with a user of their own may not write to the first; what they do goes there by way of control (relay.lua).
local function publish_at(t, kind, ...)
  local said = { 'MAXLEN', '~', ALL_MAX, '*', 'kind', kind, 'at', t, ... }
  local answer = redis.pcall('XADD', PREFIX .. 'events', unpack(said))
  if type(answer) == 'table' and answer.err then redis.call('XADD', PREFIX .. 'told', unpack(said)) end
end

local function event(id, kind, ...)
  redis.call('XADD', key(id, 'events'), 'MAXLEN', '~', JOB_MAX, '*', 'kind', kind, 'at', now(), ...)
  publish_at(now(), kind, 'job', id, ...)
end

local function set_state(id, state, t)
  local before = get(id, 'state')
  if before == state then return end
  if before then redis.call('ZREM', PREFIX .. 'jobs:' .. before, id) end
  local waiting = queued_by(get(id, 'asked_by') or '')
  if before == 'queued' then redis.call('ZREM', waiting, id) end
  if state == 'queued' then redis.call('ZADD', waiting, t, id) end
  redis.call('HSET', key(id), 'state', state, 'since', t)
  redis.call('ZADD', PREFIX .. 'jobs:' .. state, t, id)
  event(id, 'state', 'state', state)
end

-- The oldest queued job of a submitter who has so many, or nothing.
local function oldest_of_full(who, most)
  local waiting = queued_by(who)
  while redis.call('ZCARD', waiting) >= most do
    local oldest = redis.call('ZRANGE', waiting, 0, 0)[1]
    if get(oldest, 'state') == 'queued' then return oldest end
    redis.call('ZREM', waiting, oldest) -- a client removed its record
  end
  return false
end

-- A unit belongs to the latest token that claimed it, expired or not, until it is done.
local function owns(id, name, token)
  return unit(id, name, 'token') == token and redis.call('ZSCORE', key(id, 'todo'), name)
end

-- Bytes that came, in a job's hash, of a unit, or in PACE: each weighs less the longer ago it came (pace.py reads it).
local PACE = PREFIX .. 'pace'
local function paced(hash, of, bytes, t)
  local paced, paced_at, paced_from = of .. 'paced', of .. 'paced_at', of .. 'paced_from'
  local left, at, from = number(hash, paced), number(hash, paced_at), number(hash, paced_from)
  -- Or a rate would be of a time in which nothing was copied, or of another clock.
  if not (left and at and from) or math.abs(t - at) > 2 * FADES then
    redis.call('HSET', hash, paced, 0, paced_at, t, paced_from, t)
  else
    left = left * math.exp(math.min(0, at - t) / FADES)
    redis.call('HSET', hash, paced, string.format('%.0f', left + bytes), paced_at, math.max(at, t))
  end
end

local function came(id, name, bytes, t)
  paced(key(id), '', bytes, t)
  paced(key(id, 'units'), name .. '.', bytes, t)
  paced(PACE, '', bytes, t)
end

local function forget_pace(id, name)
  redis.call('HDEL', key(id, 'units'), name .. '.paced', name .. '.paced_at', name .. '.paced_from')
end

-- Nobody claims it for `lasts` ms: a lease, or a backoff.
local function hold(id, name, t, lasts)
  redis.call('ZADD', key(id, 'todo'), t + lasts, name)
  set_unit(id, name, 'lasts', lasts)
end

-- A time further off than all of its length was set before this server's clock jumped back: it is over, or a dead
-- worker's lease would last as long as the jump. The slack is for a clock that is corrected by milliseconds.
local SLACK = 1000 -- ms
local function end_impossible(id, t)
  local later = redis.call('ZREVRANGEBYSCORE', key(id, 'todo'), '+inf', '(' .. t + SLACK, 'WITHSCORES', 'LIMIT', 0, 100)
  for i = 1, #later, 2 do
    local lasts = tonumber(unit(id, later[i], 'lasts'))
    if lasts and tonumber(later[i + 1]) > t + lasts + SLACK then redis.call('ZADD', key(id, 'todo'), 0, later[i]) end
  end
end

local function free(id, name, at)
  redis.call('HDEL', key(id, 'units'), name .. '.token', name .. '.worker', name .. '.bytes')
  redis.call('ZADD', key(id, 'todo'), at, name)
end

local function unit_done(id, name, token, t)
  redis.call('ZREM', key(id, 'todo'), name)
  redis.call('HDEL', key(id, 'units'), name .. '.token', name .. '.worker', name .. '.bytes', name .. '.error')
  forget_pace(id, name)
  set_unit(id, name, 'done_by', token)
  event(id, 'finished', 'unit', name, 'took', t - (unit(id, name, 'since') or t))
end

local function free_all(id)
  for _, name in ipairs(redis.call('ZRANGE', key(id, 'todo'), 0, -1)) do free(id, name, 0) end
end

local function drop_plan(id)
  redis.call('DEL', key(id, 'plan'), key(id, 'files'), key(id, 'attested'), key(id, 'todo'), key(id, 'units'))
  redis.call('HDEL', key(id), 'schema', 'digest')
end
