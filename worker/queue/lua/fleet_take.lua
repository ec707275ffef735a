-- bytes at least, how long a share is in ms -> {bytes, ms to wait}
-- One share after the other, so that all of them together are as fast as the limit; what nobody took is not saved up.
local bandwidth = tonumber(redis.call('HGET', FLEET, 'bandwidth'))
if not bandwidth then return { ARGV[1], 0 } end
local t, line = now(), FLEET .. ':free'
local bytes = math.max(tonumber(ARGV[1]), math.floor(bandwidth * ARGV[2] / 1000))
local jumped = tonumber(redis.call('GET', line .. ':set') or 0) > t + SLACK -- this server's clock, back
local from = jumped and t or math.max(t, tonumber(redis.call('GET', line) or 0))
local free_at = from + bytes * 1000 / bandwidth
redis.call('SET', line, string.format('%.3f', free_at), 'PX', math.ceil(free_at - t) + 1000)
redis.call('SET', line .. ':set', t, 'PX', math.ceil(free_at - t) + 1000)
return { string.format('%.0f', bytes), math.ceil(from - t) }
