-- id, key, target, priority, request, asked_by, how many jobs its submitter may have queued, or nothing
-- -> {id of the active job, 1 if it was there before, its key, its state}, or {the submitter's oldest, 2, '', ''} where
-- it has so many
-- One job at a time may work on a target; the same request again is the same job.
local id, same, target = ARGV[1], ARGV[2], ARGV[3]
local active = redis.call('HGET', PREFIX .. 'active', target)
if active and not get(active, 'state') then active = false end -- a client removed its record, or wrote over it
local existed = active and active ~= id -- when it is ours, the answer was lost and we are asked again
if existed then
  id, same = active, get(active, 'key')
elseif not active then
  local full = ARGV[7] and oldest_of_full(ARGV[6], tonumber(ARGV[7]))
  if full then return { full, 2, '', '' } end
  local t = now()
  redis.call('HSET', PREFIX .. 'active', target, id)
  redis.call('HSET', key(id), 'id', id, 'key', same, 'target', target, 'priority', ARGV[4], 'request', ARGV[5],
    'asked_by', ARGV[6], 'created', t)
  redis.call('ZADD', PREFIX .. 'jobs', t, id)
  redis.call('ZADD', PREFIX .. 'ids', 0, id)
  take_turn(id)
  set_state(id, 'queued', t)
  redis.call('ZADD', key(id, 'todo'), 0, 'plan')
  ring(id, t)
end
return { id, existed and 1 or 0, same, get(id, 'state') }
