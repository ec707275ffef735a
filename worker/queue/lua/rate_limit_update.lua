-- budget, 'api' | 'resolve', calls left, ms until the window ends, its calls, its length in ms, endpoint
-- Answers overtake each other, and the Hub rounds up to whole seconds: of one window the least counts. What rate_limit_take
-- guessed, and what cannot be because no window is longer than it is, stands only until the next answer.
local LATE = 10000 -- ms; no answer comes so long after one of the next window
local window, t = PREFIX .. 'pace:' .. ARGV[1] .. ':' .. ARGV[2], now()
local left, ends, length = tonumber(ARGV[3]), t + ARGV[4], tonumber(ARGV[6])
local guess = ends > t + length + 2000
local known = redis.call('HMGET', window, 'left', 'ends', 'guess')
if known[1] and known[3] ~= '1' then
  local apart = ends - known[2]
  if guess and t < tonumber(known[2]) then return end
  if apart < -2000 and ends < known[2] - length + LATE then return end -- of the window before
  if math.abs(apart) <= 2000 then
    left, ends = math.min(left, known[1]), math.min(ends, known[2])
  end
end
if guess then ends = t + length + 2000 end
redis.call('HSET', window, 'left', left, 'ends', string.format('%.0f', ends), 'quota', ARGV[5], 'length', length,
  'guess', guess and 1 or 0)
redis.call('PEXPIRE', window, 2 * length)
local windows = PREFIX .. 'pace:windows'
redis.call('ZREMRANGEBYSCORE', windows, '-inf', t)
redis.call('ZADD', windows, t + 2 * length, ARGV[7] .. ' ' .. ARGV[2] .. ' ' .. window)
-- The least of a window's calls that were left in this hour, in percent: `reshard web` shows a day of them.
local least = PREFIX .. 'pace:least:' .. math.floor(t / 3600000)
local field, percent = ARGV[7] .. ' ' .. ARGV[2], math.floor(100 * left / math.max(1, tonumber(ARGV[5])))
if percent < tonumber(redis.call('HGET', least, field) or 101) then
  redis.call('HSET', least, field, percent)
  redis.call('EXPIRE', least, 26 * 3600)
end
