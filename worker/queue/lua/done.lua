-- id, unit, token, keep ms, result -> {'ok' | 'lost' | 'cancelled', queue to wake}
-- The unit is finished; what comes after it becomes claimable, and after the last one the job is done.
local id, name, token, keep, result = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local t = now()
if unit(id, name, 'done_by') == token then return { 'ok', settle(id, t) } end -- our answer was lost
if get(id, 'state') == 'cancelled' then return { 'cancelled', '' } end
if not owns(id, name, token) then return { 'lost', '' } end
if name == 'publish' and get(id, 'state') ~= 'committing' then return { 'lost', '' } end -- it was never begun

redis.call('ZREM', key(id, 'todo'), name)
redis.call('HDEL', key(id, 'units'), name .. '.token', name .. '.worker', name .. '.bytes', name .. '.error')
set_unit(id, name, 'done_by', token)
event(id, 'finished', 'unit', name, 'took', t - (unit(id, name, 'since') or t))

if name == 'plan' then -- what it would do has been done before
  redis.call('HSET', key(id), 'published', result)
  complete(id, t, keep)
elseif name == 'publish' then
  redis.call('HSET', key(id), 'published', result)
  redis.call('ZADD', key(id, 'todo'), 0, 'confirm')
  set_state(id, 'confirming', t)
elseif name == 'confirm' then
  redis.call('HSET', key(id), 'confirmed', result)
  redis.call('HDEL', key(id), 'error')
  complete(id, t, keep)
else
  if name == 'check' then
    redis.call('HSET', key(id), 'checked', result)
  else
    redis.call('HSET', key(id, 'attested'), name, result)
  end
  if redis.call('ZCARD', key(id, 'todo')) == 0 then redis.call('ZADD', key(id, 'todo'), 0, 'publish') end
end
return { 'ok', settle(id, t) }
