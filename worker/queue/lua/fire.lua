-- name, when it was due or '' for by hand, when it is due next, '' or 'late' or 'skip' if its time was missed, t, then
-- 'job' and what submit takes, or 'catalog' and what catalog_start takes
-- -> {'lost' | 'missing' | 'missed' | 'overlap' | 'busy' | 'fired', job}
-- Whoever moves the due time on is the one who fires it, in the same step, so no second control can.
local name, due, t = ARGV[1], ARGV[2], ARGV[5]
local schedules = PREFIX .. 'schedules'
if redis.call('HEXISTS', schedules, name) == 0 then return { 'missing', '' } end
if due ~= '' then
  local score = redis.call('ZSCORE', schedules .. ':due', name)
  if not score or tonumber(score) ~= tonumber(due) then return { 'lost', '' } end
  redis.call('ZADD', schedules .. ':due', ARGV[3], name)
  redis.call('HSETNX', schedules .. ':unmet', name, due)
end

local outcome, job = 'fired', redis.call('HGET', schedules .. ':job', name)
local state = job and get(job, 'state')
if ARGV[4] == 'skip' then
  outcome, job = 'missed', ''
elseif ARGV[6] == 'catalog' then
  job = ''
  if catalog_start(ARGV[7], ARGV[8], ARGV[9], now()) == 'busy' then
    outcome = 'overlap'
  else
    redis.call('HSET', catalog_key(ARGV[7]), 'fired_by', name)
  end
elseif state and not ENDED[state] then
  outcome = 'overlap'
else
  local _, active_key
  job, _, active_key = enqueue(ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12], now())
  if active_key ~= ARGV[8] then outcome = 'busy' end
end
if outcome == 'fired' and job ~= '' then
  redis.call('HSET', schedules .. ':job', name, job)
  local others = get(job, 'fired_by') -- of the same request
  redis.call('HSET', key(job), 'fired_by', others and others .. ' ' .. name or name)
end
if due ~= '' and (outcome ~= 'fired' or ARGV[4] ~= '') then
  went_wrong('schedule', name, now())
  notice(now(), 'kind', 'missed', 'what', 'schedule', 'name', name, 'job', job, 'due', due, 'outcome', outcome)
end

local runs = PREFIX .. 'schedule:' .. name .. ':runs'
redis.call('LPUSH', runs, cjson.encode({ at = tonumber(t), due = tonumber(due) or tonumber(t), outcome = outcome, job = job }))
redis.call('LTRIM', runs, 0, 99)
return { outcome, job }
