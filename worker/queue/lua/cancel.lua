-- id -> {'ok' | 'missing' | 'refused', the state it found}
-- Every token dies with it, so that an old copier is still an old copier when the job is retried at once.
local id = ARGV[1]
local state = get(id, 'state')
if not state then return { 'missing', '' } end
if state == 'cancelled' then return { 'ok', state } end
if not CANCELLABLE[state] then return { 'refused', state } end
finish(id, 'cancelled', now())
return { 'ok', state }
