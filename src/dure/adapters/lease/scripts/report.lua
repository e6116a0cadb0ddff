-- The end of a lease by its holder's word: `complete` (end = done) and `fail` (the others).
-- A result counts only here, once, and only from the lease in force.
-- ARGV: prefix, id, epoch, lease_id, end, result, sha256, detail, age_ms, started_age_ms, freed_age_ms (-1: not yet)
local id, epoch, lease, how, sha = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[7]
local k = task(id)
local f = redis.call('HMGET', k, 'status', 'lease_epoch', 'lease_id', 'fenced_epoch', 'node', 'result_sha256',
  'freed_at', 'expired_at', 'seq')
if not f[1] then return 'GONE' end
if not holds(f[2], f[3], f[4], epoch, lease) then
  if how == 'done' then
    redis.call('SET', P .. 'task:stale:' .. id .. ':' .. epoch, ARGV[6], 'PX', EVIDENCE_MS)
  end
  return 'STALE'
end
local started, freed = tonumber(ARGV[10]), tonumber(ARGV[11])
if started >= 0 then redis.call('HSETNX', k, 'started_at', NOW - started) end
local freshly = freed >= 0 and not f[7]
if freshly then redis.call('HSET', k, 'freed_at', NOW - freed) end
local answer = 'OK'
if f[1] == 'DONE' then
  answer = 'DUP'
  if how == 'done' and f[6] ~= sha then answer = 'DIFFERS' end
  if freshly then changed(id) end
  return answer
end
if f[1] == 'DEAD' or f[1] == 'CANCELLED' then
  if freshly then changed(id) end
  return 'TERMINAL'
end
local live = f[1] == 'DISPATCHED' or f[1] == 'RUNNING'
if how == 'done' then
  -- Also from NODE_WAIT and FAILED: late, but nobody has taken it over.
  unqueue(id, f[1], f[5])
  redis.call('HSET', k, 'status', 'DONE', 'done_at', NOW - tonumber(ARGV[9]), 'result', ARGV[6],
    'result_sha256', sha)
elseif live and how ~= 'freed' then
  unqueue(id, f[1], f[5])
  local gone = how == 'gone'
  redis.call('HSET', k, 'status', gone and 'NODE_WAIT' or 'FAILED', 'expired_at', NOW,
    'expired_state', gone and 'OFFLINE' or 'STABLE', 'detail', ARGV[8])
  redis.call('HDEL', k, 'returned')
  if gone then redis.call('ZADD', P .. 'task:queue:nodewait:' .. f[5], number(f[9]), id) end
elseif live then
  return 'OK'                                           -- free, but its end is still to come
elseif not freshly then
  return 'DUP'
end
changed(id)
return answer
