-- how many lines a job keeps, then lines, the oldest first: what the worker logged of the unit
local lines = key(id, 'log')
if redis.call('TYPE', lines).ok ~= 'list' then redis.call('DEL', lines) end -- a client wrote over it
redis.call('RPUSH', lines, unpack(ARGV, 5))
redis.call('LTRIM', lines, -tonumber(ARGV[4]), -1)
redis.call('HINCRBY', key(id), 'logged', #ARGV - 4)
return { 'ok', '' }
