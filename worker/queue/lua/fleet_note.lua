-- bytes of weights that were read, 1 if by a bulk job, night
local stretch = FLEET .. ':read:' .. math.floor(now() / 10000)
redis.call('INCRBY', stretch, ARGV[1])
redis.call('PEXPIRE', stretch, 30000)
if ARGV[2] == '1' then
  local night = FLEET .. ':night:' .. ARGV[3]
  redis.call('INCRBY', night, ARGV[1])
  redis.call('PEXPIRE', night, 2 * 86400000)
end
