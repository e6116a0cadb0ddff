-- A retry by hand: what was counted is forgotten, the epoch is kept. ARGV: prefix, id
local k = task(ARGV[2])
local f = redis.call('HMGET', k, 'status', 'node')
if f[1] ~= 'DEAD' and f[1] ~= 'FAILED' and f[1] ~= 'NODE_WAIT' then return 'KEPT' end
unqueue(ARGV[2], f[1], f[2])
redis.call('HSET', k, 'status', 'FAILED', 'retries', 0, 'node_lost_count', 0)
redis.call('HDEL', k, 'cancel')
redis.call('PERSIST', k)
redis.call('ZADD', DELAYED, NOW, ARGV[2])
return 'WAITS'
