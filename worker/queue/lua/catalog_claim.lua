-- name, token, lease ms -> the run whose expanding is this token's now, or ''; claiming again keeps it
local name, token, t = ARGV[1], ARGV[2], now()
local base = catalog_key(name)
if redis.call('HGET', base, 'state') ~= 'expanding' then return '' end
local owner = redis.call('HGET', base, 'expander')
if owner and owner ~= token and tonumber(redis.call('HGET', base, 'expander_until')) > t then return '' end
redis.call('HSET', base, 'expander', token, 'expander_until', t + tonumber(ARGV[3]))
return redis.call('HGET', base, 'run')
