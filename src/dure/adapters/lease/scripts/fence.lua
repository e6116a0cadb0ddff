-- Never let this epoch start, go on or commit again; whatever the task was waiting for is over.
-- ARGV: prefix, id, epoch
local id, epoch = ARGV[2], tonumber(ARGV[3])
local k = task(id)
local f = redis.call('HMGET', k, 'status', 'issued_epoch', 'fenced_epoch', 'node', 'lease_epoch')
if number(f[3]) < epoch then redis.call('HSET', k, 'id', id, 'fenced_epoch', ARGV[3]) end
if number(f[2]) > epoch then return 'NEWER' end        -- a newer dispatch goes on
if f[1] then unqueue(id, f[1], f[4]) end
if number(f[5]) < epoch then redis.call('HSET', k, 'lease_epoch', ARGV[3]) end
redis.call('HSET', k, 'lease_id', '')
if f[1] ~= 'DONE' and f[1] ~= 'DEAD' then redis.call('HSET', k, 'status', 'CANCELLED') end
redis.call('ZREM', CHANGED, id)
redis.call('PEXPIRE', k, KEEP_MS)
if f[4] then ring(f[4]) end
return 'FENCED'
