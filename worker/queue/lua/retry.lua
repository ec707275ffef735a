-- id, 1 to plan anew, the request to plan by or '', schema, how many jobs its submitter may have queued, or nothing
-- -> {'ok' | 'missing' | 'refused' | 'published' | 'busy' | 'full', the state it found, the job that has the target, or
--     the submitter's oldest}
-- The job goes on where it ended: receipts stay, and attempts are forgiven. One that was rolled back is planned anew,
-- because a confirm would read the commit that was undone; so is one whose target was deleted, and one that another
-- release planned, of which perhaps no worker is left. Planning finds a commit that exists.
local id, anew = ARGV[1], ARGV[2] == '1'
local t = now()
local state = get(id, 'state')
if not state then return { 'missing', '' } end
if not ENDED[state] or state == 'done' then return { 'refused', state } end
local target = get(id, 'target')
local active = redis.call('HGET', PREFIX .. 'active', target)
if active and active ~= id and get(active, 'state') then return { 'busy', active } end

local todo = key(id, 'todo')
local confirm = redis.call('ZSCORE', todo, 'confirm')
local failure = get(id, 'error')
anew = anew or failure and cjson.decode(failure).code == 'target.gone'
local whole = get(id, 'undone') or (get(id, 'schema') or ARGV[4]) ~= ARGV[4] or anew and not confirm
if ARGV[3] ~= '' and not whole then return { 'published', state } end
local full = ARGV[5] and (whole or redis.call('ZSCORE', todo, 'plan'))
  and oldest_of_full(get(id, 'asked_by') or '', tonumber(ARGV[5]))
if full then return { 'full', full } end
if whole then
  drop_plan(id)
  redis.call('HDEL', key(id), 'published')
  redis.call('ZADD', todo, 0, 'plan')
  if ARGV[3] ~= '' then redis.call('HSET', key(id), 'request', ARGV[3]) end
end
free_all(id)
local forgiven = { attempts = true, error = true, failed_by = true, voids = true }
for _, field in ipairs(redis.call('HKEYS', key(id, 'units'))) do -- of units that are done, too, as they may be reopened
  if forgiven[field:match('[^.]*$')] then redis.call('HDEL', key(id, 'units'), field) end
end
redis.call('HDEL', key(id), 'error', 'last_error', 'note', 'undone', 'started', 'unknown_to')
redis.call('HSET', key(id), 'asked', t)
take_turn(id)
redis.call('HSET', PREFIX .. 'active', target, id)

local next_state = 'copying'
if redis.call('ZSCORE', todo, 'plan') then next_state = 'queued'
elseif confirm then next_state = 'confirming'
-- whether a commit stands is still open, so the job stays behind the point of no return
elseif state == 'published_unverified' then next_state = 'committing' end
event(id, 'retried', 'from', state)
set_state(id, next_state, t)
ring(id, t)
return { 'ok', state }
