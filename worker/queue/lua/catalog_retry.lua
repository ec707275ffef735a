-- name, run, then entry, its job or '' of each -> how many get another turn, or -1 while entries are still made
local name, again = ARGV[1], 0
local state, run = unpack(redis.call('HMGET', catalog_key(name), 'state', 'run'))
if state == 'expanding' or run ~= ARGV[2] then return -1 end
for i = 3, #ARGV, 2 do
  local ended = redis.call('HGET', catalog_key(name, 'ended'), ARGV[i])
  if ended then
    redis.call('HDEL', catalog_key(name, 'ended'), ARGV[i])
    catalog_count(name, ended, -1)
    redis.call('ZADD', catalog_key(name, 'todo'), ARGV[i], ARGV[i])
    if ARGV[i + 1] ~= '' then
      redis.call('HSET', catalog_key(name, 'again'), ARGV[i], ARGV[i + 1])
      if get(ARGV[i + 1], 'state') then -- it goes on, and tells at its end all that it ever read
        redis.call('HINCRBY', catalog_key(name), 'bytes', 0 - cjson.decode(ended).read)
      end
    end
    again = again + 1
  end
end
if again > 0 then
  redis.call('HSET', catalog_key(name), 'failures', 0)
  redis.call('HDEL', catalog_key(name), 'note')
  if state ~= 'paused' then catalog_state(name, 'running', now()) end
end
return again
