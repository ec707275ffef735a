-- The point of no return, in one step with cancel: whichever comes first wins.
if name ~= 'publish' then return { 'lost', '' } end
set_state(id, 'committing', t)
redis.call('ZREM', PREFIX .. 'held', id) -- it waits for no window any more, and whoever has it may die
look_at(id, redis.call('ZSCORE', key(id, 'todo'), name))
return { 'ok', '' }
