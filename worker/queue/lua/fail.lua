-- error, 'retry' | 'final' | 'unsure', delay ms
-- `final`: nothing more will come of this job. `unsure`: given up without knowing whether a commit stands.
local failure, verdict = ARGV[4], ARGV[5]
if verdict == 'retry' then
  set_unit(id, name, 'error', failure)
  free(id, name, 0)
  hold(id, name, t, tonumber(ARGV[6]))
  redis.call('HSET', key(id), 'last_error', failure)
  event(id, 'trouble', 'unit', name, 'error', failure)
  return { 'ok', settle(id, t) }
end
local state = get(id, 'state')
local published = state == 'confirming' or (state == 'committing' and verdict == 'unsure')
redis.call('HSET', key(id), 'error', failure)
event(id, 'failed', 'unit', name, 'error', failure)
finish(id, published and 'published_unverified' or 'failed', t)
return { 'ok', '' }
