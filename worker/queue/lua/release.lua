-- id, unit, token, why -> {'ok' | 'lost' | 'cancelled', queue to wake}
-- An orderly hand-back costs no attempt.
local id, name, token = ARGV[1], ARGV[2], ARGV[3]
local t = now()
if get(id, 'state') == 'cancelled' then return { 'cancelled', '' } end
if not owns(id, name, token) then return { 'lost', '' } end
if tonumber(unit(id, name, 'attempts') or 0) > 0 then
  redis.call('HINCRBY', key(id, 'units'), name .. '.attempts', -1)
end
free(id, name, 0)
event(id, 'released', 'unit', name, 'why', ARGV[4])
return { 'ok', settle(id, t) }
