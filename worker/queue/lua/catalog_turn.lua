-- name, 'paused' | 'running' | 'cancelled' | 'failed', note, and for 'failed' the run and the token that expands it
-- -> {'missing' | 'refused' | 'ok', the state it found}
local FROM = {
  paused = { running = true },
  running = { paused = true, stopped = true },
  cancelled = { expanding = true, running = true, paused = true, stopped = true },
  failed = { expanding = true },
}
local name, state = ARGV[1], ARGV[2]
local base = catalog_key(name)
local found = redis.call('HGET', base, 'state')
if not found then return { 'missing', '' } end
local cut_short = state == 'cancelled' and found == state and redis.call('HLEN', catalog_key(name, 'active')) > 0
if not FROM[state][found] and not cut_short then return { 'refused', found } end
if state == 'failed' then -- said by who expands, perhaps of a run that was cancelled and begun anew meanwhile
  local run, token = unpack(redis.call('HMGET', base, 'run', 'expander'))
  if run ~= ARGV[4] or token ~= ARGV[5] then return { 'refused', found } end
end
redis.call('HDEL', base, 'note')
if ARGV[3] ~= '' then redis.call('HSET', base, 'note', ARGV[3]) end
if found == 'stopped' then redis.call('HSET', base, 'failures', 0, 'bytes', 0) end -- what stopped it is forgiven
if state == 'cancelled' then redis.call('DEL', catalog_key(name, 'todo'), catalog_key(name, 'again')) end
local left = redis.call('ZCARD', catalog_key(name, 'todo')) + redis.call('HLEN', catalog_key(name, 'active'))
if state == 'running' and left == 0 then state = 'done' end -- its last job ended in the pause
catalog_state(name, state, now())
return { 'ok', found }
