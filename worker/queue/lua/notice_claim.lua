-- hook, lease ms -> what HGETALL gives of the notice to tell now, or nothing
-- Whoever is given one has it for the lease; then it is offered again, so that none is lost with who died over it.
local hook, t = ARGV[1], now()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', outbox_key(hook), '-inf', t)) do
  if redis.call('EXISTS', notice_key(hook, id)) == 1 then
    redis.call('ZADD', outbox_key(hook), t + tonumber(ARGV[2]), id)
    redis.call('HINCRBY', notice_key(hook, id), 'attempts', 1)
    return redis.call('HGETALL', notice_key(hook, id))
  end
  drop_notice(hook, id, 'dropped')
end
return {}
