-- error -> also 'alone'
-- The worker is at fault and not the job: another one gets the unit, and no attempt is counted. `alone`: every worker
-- that is alive has failed it so, and this one still has it.
local failure, mine = ARGV[4], process(unit(id, name, 'worker'))
local failed_by = unit(id, name, 'failed_by') or ' '
if not failed(id, name, mine) then set_unit(id, name, 'failed_by', failed_by .. mine .. ' ') end
if not others(id, name, failure) then return { 'alone', '' } end
set_unit(id, name, 'attempts', math.max(0, (unit(id, name, 'attempts') or 0) - 1))
set_unit(id, name, 'error', failure)
free(id, name, 0)
redis.call('HSET', key(id), 'last_error', failure)
event(id, 'trouble', 'unit', name, 'error', failure, 'worker', mine)
return { 'ok', settle(id, t) }
