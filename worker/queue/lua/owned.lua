-- What each step of a worker that has a unit begins with (OWNED in scripts.py); ARGV: id, unit, token, and its own.
-- It answers {'ok' | 'lost' | 'cancelled' | ..., queue to wake or ''}, and where it was refused changes nothing.
local id, name, token, t = ARGV[1], ARGV[2], ARGV[3], now()
if get(id, 'state') == 'cancelled' then return { 'cancelled', '' } end
if not owns(id, name, token) then
  if unit(id, name, 'done_by') == token then return { 'ok', settle(id, t) } end -- our answer was lost
  return { 'lost', '' }
end
