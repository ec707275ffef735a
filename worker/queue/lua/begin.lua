-- id, token -> 'ok' | 'lost' | 'cancelled'
-- The point of no return, in one step with cancel: whichever comes first wins.
local id, token = ARGV[1], ARGV[2]
if get(id, 'state') == 'cancelled' then return 'cancelled' end
if not owns(id, 'publish', token) then return 'lost' end
set_state(id, 'committing', now())
redis.call('ZREM', PREFIX .. 'held', id) -- it waits for no window any more, and whoever has it may die
look_at(id, redis.call('ZSCORE', key(id, 'todo'), 'publish'))
return 'ok'
