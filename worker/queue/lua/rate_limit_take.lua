-- budget, 'api' | 'resolve', 1 if for bulk work, share of the calls that bulk work leaves -> ms to wait, 0 for none
-- Counts the call when it may go. The Hub's windows are fixed: each begins with the first call after the last one.
local budget = PREFIX .. 'pace:' .. ARGV[1]
local told = redis.call('PTTL', budget)
if told > 0 then return told end
local window, t = budget .. ':' .. ARGV[2], now()
local left, ends, quota, length = unpack(redis.call('HMGET', window, 'left', 'ends', 'quota', 'length'))
if not left then return 0 end
-- One that ends later than any that begins now is from before this server's clock jumped back.
if t >= tonumber(ends) or tonumber(ends) > t + length + 2000 + SLACK then
  left, ends = quota, t + length + 1000 -- a second for the way of our call to the Hub, where the window begins
  redis.call('HSET', window, 'left', left, 'ends', ends, 'guess', 1) -- others with the token may have begun it
end
local kept = ARGV[3] == '1' and math.floor(quota * ARGV[4]) or 0
if tonumber(left) <= kept then return math.ceil(ends - t) end
redis.call('HINCRBY', window, 'left', -1)
redis.call('PEXPIRE', window, 2 * length)
return 0
