-- id of a job that has not ended and was in no place of the queue -> 1 if it is rung, 0 if nothing is left to claim
-- Its submit was cut off by what its client may not do, or another client wrote over a key.
local id = ARGV[1]
local state = readable(id) and get(id, 'state')
if state == 'queued' then redis.call('ZADD', key(id, 'todo'), 'NX', 0, 'plan') end
if not state or redis.call('ZCARD', key(id, 'todo')) == 0 then
  drop(id, 'left')
  return 0
end
ring(id, now())
return 1
