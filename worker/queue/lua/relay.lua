-- ARGV: an id in the stream of what clients did, and 1 if it is to be followed. Answers whether it was still there.
local found = redis.call('XRANGE', PREFIX .. 'told', ARGV[1], ARGV[1])[1]
if not found then return 0 end
if ARGV[2] == '1' then redis.call('XADD', PREFIX .. 'events', 'MAXLEN', '~', ALL_MAX, '*', unpack(found[2])) end
return redis.call('XDEL', PREFIX .. 'told', ARGV[1])
