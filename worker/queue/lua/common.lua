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

local EVENTS_MAX = 1000 -- of one job; after that the oldest go

local function event(id, kind, ...)
  redis.call('XADD', key(id, 'events'), 'MAXLEN', '~', EVENTS_MAX, '*', 'kind', kind, 'at', now(), ...)
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
  redis.call('LPUSH', PREFIX .. 'bell', id)
  redis.call('LTRIM', PREFIX .. 'bell', 0, 999)
end

-- One job at a time may work on a target; the same request again is the same job.
-- -> id of the active job, 1 if it was there before, its key
local function enqueue(id, same, target, priority, request, asked_by, t)
  local active = redis.call('HGET', PREFIX .. 'active', target)
  if active == id then return id, 0, same end -- our own answer was lost and we ask again
  if active then return active, 1, get(active, 'key') end
  redis.call('HSET', PREFIX .. 'active', target, id)
  redis.call('HSET', key(id), 'id', id, 'key', same, 'target', target, 'priority', priority, 'request', request,
    'asked_by', asked_by, 'created', t)
  redis.call('ZADD', PREFIX .. 'jobs', t, id)
  redis.call('ZADD', PREFIX .. 'ids', 0, id)
  set_state(id, 'queued', t)
  redis.call('ZADD', key(id, 'todo'), 0, 'plan')
  ring(id, t)
  return id, 0, same
end

-- What became of things since this broker began, for metrics: reshard:totals, a hash of counters.
local function count(what, by)
  redis.call('HINCRBY', PREFIX .. 'totals', what, by)
end

-- A notice is what operators are told. Each hook has an outbox of its own, so that one that fails does not repeat the
-- other, and notices are only kept where a control with such a hook gave a sign of life within a day.
--   reshard:hooked:<hook>       there for that day
--   reshard:outbox:<hook>       sorted set: notice -> when it may be told; a lease and a backoff are just a time
--   reshard:notice:<hook>:<id>  hash: what it says, and how often it was claimed
local HOOKS = { 'command', 'url' }
local NOTICES_MAX = 1000 -- in one outbox; after that the oldest goes, or a broken hook would fill the broker
local NOTICES_KEPT = 2 * 86400000 -- ms; control gives up after one day

local function outbox_key(hook)
  return PREFIX .. 'outbox:' .. hook
end

local function notice_key(hook, id)
  return PREFIX .. 'notice:' .. hook .. ':' .. id
end

local function drop_notice(hook, id, why)
  redis.call('ZREM', outbox_key(hook), id)
  redis.call('DEL', notice_key(hook, id))
  count('notices:' .. hook .. ':' .. why, 1)
end

local function notice(t, ...)
  local id = string.format('%.0f-%.0f', t, redis.call('INCR', PREFIX .. 'notices'))
  for _, hook in ipairs(HOOKS) do
    if redis.call('EXISTS', PREFIX .. 'hooked:' .. hook) == 1 then
      redis.call('HSET', notice_key(hook, id), 'id', id, 'at', t, 'attempts', 0, ...)
      redis.call('PEXPIRE', notice_key(hook, id), NOTICES_KEPT)
      redis.call('ZADD', outbox_key(hook), t, id)
      redis.call('PEXPIRE', outbox_key(hook), NOTICES_KEPT)
      if redis.call('ZCARD', outbox_key(hook)) > NOTICES_MAX then
        drop_notice(hook, redis.call('ZRANGE', outbox_key(hook), 0, 0)[1], 'dropped')
      end
    end
  end
end

-- How a schedule or a catalog (`what`) fares:
--   reshard:<what>s:success  hash: name -> when it last ended well
--   reshard:<what>s:trouble  hash: name -> when it last did not, until it ends well again
--   reshard:schedules:unmet  hash: name -> the first of its times since it last ended well
-- -> true if it had been in trouble
local function went_well(what, name, t)
  redis.call('HSET', PREFIX .. what .. 's:success', name, t)
  redis.call('HDEL', PREFIX .. what .. 's:unmet', name)
  return redis.call('HDEL', PREFIX .. what .. 's:trouble', name) == 1
end

local function went_wrong(what, name, t)
  redis.call('HSET', PREFIX .. what .. 's:trouble', name, t)
end

-- A job ended that schedules fired; only the last one that a schedule fired says how it fares. Whoever cancels one knows.
local function tell_schedules(id, state, t)
  for name in string.gmatch(get(id, 'fired_by') or '', '%S+') do
    if redis.call('HGET', PREFIX .. 'schedules:job', name) == id then
      if state == 'done' then
        if went_well('schedule', name, t) then notice(t, 'kind', 'recovered', 'what', 'schedule', 'name', name, 'job', id) end
      elseif state ~= 'cancelled' then
        went_wrong('schedule', name, t)
        notice(t, 'kind', 'failed', 'what', 'schedule', 'name', name, 'job', id, 'error', get(id, 'error') or '')
      end
    end
  end
end

local function finish(id, state, t)
  free_all(id)
  set_state(id, state, t)
  drop(id, 'due')
  drop(id, 'waked')
  redis.call('ZREM', PREFIX .. 'held', id)
  local target = get(id, 'target')
  if redis.call('HGET', PREFIX .. 'active', target) == id then redis.call('HDEL', PREFIX .. 'active', target) end
  count('ended:' .. state, 1)
  tell_schedules(id, state, t)
end

-- A job that was carried to its end needs its details only for who is still watching.
local function complete(id, t, keep)
  finish(id, 'done', t)
  for _, part in ipairs(PARTS) do redis.call('PEXPIRE', key(id, part), keep) end
end

-- A catalog is a hash, and beside it:
--   :entries  hash: entry -> repo, request, and what source and target were when it was expanded
--   :todo     sorted set: entry -> its turn
--   :again    hash: entry -> the job that is to go on instead of a new one
--   :active   hash: entry -> job
--   :ended    hash: entry -> how it ended
--   :counts   hash: outcome -> how many entries ended so; failed:<error code> -> how many of those that failed
--   :record   hash: request -> what source and target were after it was last carried out; outlives the run
local UNDER_WAY = { expanding = true, running = true, paused = true }

local function catalog_key(name, part)
  local base = PREFIX .. 'catalog:' .. name
  return part and (base .. ':' .. part) or base
end

-- `by` is 1 for an entry that ended, -1 for one that gets another turn
local function catalog_count(name, ended, by)
  local how = cjson.decode(ended)
  redis.call('HINCRBY', catalog_key(name, 'counts'), how.outcome, by)
  if how.error ~= cjson.null then
    redis.call('HINCRBY', catalog_key(name, 'counts'), 'failed:' .. how.error.code, by)
  end
end

-- A run came to its end: well, when no entry failed. Whoever cancels one knows.
local function tell_catalog(name, state, t)
  if state ~= 'done' and state ~= 'stopped' and state ~= 'failed' then return end
  local schedule, note = unpack(redis.call('HMGET', catalog_key(name), 'fired_by', 'note'))
  if schedule and redis.call('HEXISTS', PREFIX .. 'schedules', schedule) == 0 then schedule = false end
  if state == 'done' and tonumber(redis.call('HGET', catalog_key(name, 'counts'), 'failed') or 0) == 0 then
    local recovered = went_well('catalog', name, t)
    if schedule then recovered = went_well('schedule', schedule, t) or recovered end
    if recovered then
      notice(t, 'kind', 'recovered', 'what', 'catalog', 'name', name, 'schedule', schedule or '')
    end
    return
  end
  went_wrong('catalog', name, t)
  if schedule then went_wrong('schedule', schedule, t) end
  notice(t, 'kind', 'failed', 'what', 'catalog', 'name', name, 'schedule', schedule or '', 'state', state,
    'note', note or '', 'entries', redis.call('HLEN', catalog_key(name, 'entries')),
    'counts', cjson.encode(redis.call('HGETALL', catalog_key(name, 'counts'))))
end

local function catalog_state(name, state, t)
  local before = redis.call('HGET', catalog_key(name), 'state')
  redis.call('HSET', catalog_key(name), 'state', state, 'since', t)
  if state ~= before then tell_catalog(name, state, t) end
  local looked_at = UNDER_WAY[state] or redis.call('HLEN', catalog_key(name, 'active')) > 0
  redis.call(looked_at and 'SADD' or 'SREM', PREFIX .. 'catalogs:looked_at', name)
end

-- Begins a run -> 'started', or 'busy' while one is under way
local function catalog_start(name, run, definition, t)
  local state = redis.call('HGET', catalog_key(name), 'state')
  if UNDER_WAY[state] or redis.call('HLEN', catalog_key(name, 'active')) > 0 then return 'busy' end
  for _, part in ipairs({ 'entries', 'todo', 'again', 'ended', 'counts' }) do redis.call('DEL', catalog_key(name, part)) end
  redis.call('DEL', catalog_key(name))
  redis.call('HSET', catalog_key(name), 'run', run, 'definition', definition, 'started', t, 'failures', 0, 'bytes', 0)
  redis.call('SADD', PREFIX .. 'catalogs', name)
  catalog_state(name, 'expanding', t)
  return 'started'
end
