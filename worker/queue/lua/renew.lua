-- bytes since the last seal, lease ms, 1 if there was progress, yield pause ms, 1 if the window is shut, why it waits for
-- the Hub, or '' -> also 'yield'
-- Without progress the lease runs out by itself, and whoever claims the unit next makes this token worthless.
local more = tonumber(ARGV[4]) - (unit(id, name, 'bytes') or 0)
if more > 0 then came(id, name, more, t) end
set_unit(id, name, 'bytes', ARGV[4])
set_unit(id, name, 'waits', ARGV[9])
if ARGV[6] == '1' then hold(id, name, t, tonumber(ARGV[5])) end
-- The night's bytes take nothing back: who goes on with a file reads it from its start, and would each night.
if paused() or (ARGV[8] == '1' and closed(id, '', ARGV[8])) then return { 'yield', '' } end
-- Whether this worker could have one of the interactive jobs that come next, and not only wake for them in vain.
local LOOKED = 100 -- jobs; each renewal of a bulk copy looks at no more
local function helps(worker)
  if redis.call('LLEN', PREFIX .. 'interactive') == 0 or leaves_out(process(worker), PREFIX .. 'interactive') then return false end
  for _, other in ipairs(redis.call('ZRANGE', PREFIX .. 'interactive:order', 0, LOOKED - 1)) do
    if readable(other) and not unknown_to(other, process(worker)) and claimable(other, worker, t) then return true end
  end
  return false
end
if get(id, 'priority') == 'bulk' and helps(unit(id, name, 'worker'))
    and redis.call('SET', PREFIX .. 'yielding', id, 'NX', 'PX', ARGV[7]) then
  return { 'yield', '' }
end
return { 'ok', '' }
