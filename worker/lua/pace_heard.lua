-- budget, 'api' | 'resolve', calls left, ms until the window ends, its calls, its length in ms
-- Answers overtake each other, and the Hub rounds up to whole seconds: of one window the least counts.
local window, t = PREFIX .. 'pace:' .. ARGV[1] .. ':' .. ARGV[2], now()
local left, ends, length = tonumber(ARGV[3]), t + ARGV[4], tonumber(ARGV[6])
local known = redis.call('HMGET', window, 'left', 'ends')
if known[1] then
  local apart = ends - known[2]
  if apart < -2000 then return end -- of a window that is over
  if apart <= 2000 then
    left, ends = math.min(left, known[1]), math.min(ends, known[2])
  end
end
redis.call('HSET', window, 'left', left, 'ends', string.format('%.0f', ends), 'quota', ARGV[5], 'length', length)
redis.call('PEXPIRE', window, 2 * length)
