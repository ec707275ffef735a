-- name, run, entry, how it ended, 1 if it failed, bytes read, key of its record or '', its record, most failures or '',
-- most bytes or '' -> 1 if it is this call that ended it
local name, entry, t = ARGV[1], ARGV[3], now()
local base = catalog_key(name)
if redis.call('HGET', base, 'run') ~= ARGV[2] then return 0 end
local was = redis.call('HDEL', catalog_key(name, 'active'), entry) + redis.call('ZREM', catalog_key(name, 'todo'), entry)
if was == 0 then return 0 end
redis.call('HSET', catalog_key(name, 'ended'), entry, ARGV[4])
catalog_count(name, ARGV[4], 1)
local failures = redis.call('HINCRBY', base, 'failures', ARGV[5])
local bytes = redis.call('HINCRBY', base, 'bytes', ARGV[6])
if ARGV[7] ~= '' then redis.call('HSET', catalog_key(name, 'record'), ARGV[7], ARGV[8]) end

local state = redis.call('HGET', base, 'state')
local left = redis.call('ZCARD', catalog_key(name, 'todo'))
if state == 'running' then
  if left > 0 and ARGV[9] ~= '' and failures > tonumber(ARGV[9]) then
    redis.call('HSET', base, 'note', 'more than ' .. ARGV[9] .. ' failed')
    state = 'stopped'
  elseif left > 0 and ARGV[10] ~= '' and bytes >= tonumber(ARGV[10]) then
    redis.call('HSET', base, 'note', ARGV[10] .. ' bytes were read')
    state = 'stopped'
  elseif left == 0 and redis.call('HLEN', catalog_key(name, 'active')) == 0 then
    state = 'done'
  end
  if state ~= 'running' then catalog_state(name, state, t) end
elseif not UNDER_WAY[state] then
  catalog_state(name, state, t) -- with its last job it need not be looked at any more
end
return 1
