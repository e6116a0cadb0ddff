-- Show what the store decided after a loss. Nothing becomes runnable here.
-- ARGV: prefix, id, epoch, status, retries, due_ms, node_wait_count, node_lost_count
local id, status = ARGV[2], ARGV[4]
local k = task(id)
local f = redis.call('HMGET', k, 'status', 'issued_epoch', 'node', 'seq')
local waits = f[1] == 'NODE_WAIT' or f[1] == 'FAILED'
if not waits or f[2] ~= ARGV[3] then return 'KEPT' end  -- it runs, has ended, or is dispatched anew
unqueue(id, f[1], f[3])
redis.call('HSET', k, 'status', status, 'retries', ARGV[5], 'node_wait_count', ARGV[7], 'node_lost_count', ARGV[8])
if status == 'FAILED' then
  redis.call('ZADD', DELAYED, ARGV[6], id)
elseif status == 'NODE_WAIT' then
  redis.call('HSETNX', k, 'node_wait_since', NOW)
  redis.call('ZADD', P .. 'task:queue:nodewait:' .. f[3], number(f[4]), id)
elseif status == 'DEAD' or status == 'CANCELLED' then
  redis.call('PEXPIRE', k, KEEP_MS)
end
return 'SHOWN'
