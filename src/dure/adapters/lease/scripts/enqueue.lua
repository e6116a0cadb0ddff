-- Put one dispatch of the store into the line: writes epoch e-1, so that the claim makes it e.
-- ARGV: prefix, id, epoch, node, payload, need_vram_mb, idempotent, max_retries
local id, epoch, node = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local k = task(id)
local f = redis.call('HMGET', k, 'status', 'issued_epoch', 'fenced_epoch', 'target_node', 'seq')
if number(f[3]) >= epoch then return 'FENCED' end
if f[1] and number(f[2]) == epoch then return 'KNOWN' end
if number(f[2]) > epoch then return 'STALE' end
if f[1] then unqueue(id, f[1], f[4]) end
redis.call('HDEL', k, 'lease_id', 'acked_at', 'dispatched_at', 'started_at', 'done_at', 'freed_at', 'expired_at',
  'expired_state', 'returned', 'resumed_at', 'cancel', 'result', 'result_sha256', 'detail', 'last_heartbeat')
redis.call('HSET', k, 'id', id, 'type', 'job', 'payload', ARGV[5], 'status', 'PENDING', 'target_node', node,
  'node', node, 'lease_epoch', string.format('%d', epoch - 1), 'issued_epoch', ARGV[3], 'need_vram_mb', ARGV[6],
  'idempotent', ARGV[7], 'max_retries', ARGV[8], 'queued_at', NOW)
redis.call('HSETNX', k, 'created_at', NOW)
redis.call('HSETNX', k, 'retries', 0)
if not f[5] then redis.call('HSET', k, 'seq', redis.call('INCR', P .. 'task:order')) end
redis.call('PERSIST', k)
redis.call('LPUSH', PENDING, id)
changed(id)
ring(node)
return 'QUEUED'
