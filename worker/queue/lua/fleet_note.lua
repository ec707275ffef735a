-- bytes of weights that were read, 1 if by a bulk job, night, ms of a stretch
local stretch = FLEET .. ':read:' .. math.floor(now() / ARGV[4])
redis.call('INCRBY', stretch, ARGV[1])
redis.call('PEXPIRE', stretch, 3 * ARGV[4])
if ARGV[2] == '1' then
  local night = FLEET .. ':night:' .. ARGV[3]
  redis.call('INCRBY', night, ARGV[1])
  redis.call('PEXPIRE', night, 2 * 86400000)
end
