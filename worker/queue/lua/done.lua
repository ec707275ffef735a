-- keep ms, result
-- The unit is finished; what comes after it becomes claimable, and after the last one the job is done.
local keep, result = ARGV[4], ARGV[5]
if name == 'publish' and get(id, 'state') ~= 'committing' then return { 'lost', '' } end -- it was never begun

unit_done(id, name, token, t)
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
