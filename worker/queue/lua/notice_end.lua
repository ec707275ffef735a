-- hook, id, attempt, 1 if it was told, delay ms, most ms since it happened -> 'told' | 'again' | 'dropped' | 'lost'
local hook, id, t = ARGV[1], ARGV[2], now()
local attempts, at = unpack(redis.call('HMGET', notice_key(hook, id), 'attempts', 'at'))
if not attempts then return 'lost' end
if ARGV[4] == '1' then
  drop_notice(hook, id, 'told')
  return 'told'
end
if attempts ~= ARGV[3] then return 'lost' end -- another control tries by now
count('notices:' .. hook .. ':failed', 1)
if t - tonumber(at) > tonumber(ARGV[6]) then
  drop_notice(hook, id, 'dropped')
  return 'dropped'
end
redis.call('ZADD', outbox_key(hook), t + tonumber(ARGV[5]), id)
return 'again'
