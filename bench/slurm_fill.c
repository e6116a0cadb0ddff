/* Fills a Slurm queue with single jobs, not arrays: an array is one record until it starts.
 *
 * slurm_fill FIRST COUNT: job i of the queue is the same in every run. Half of the jobs name
 * a tier's partition, half leave the choice among two; one in three asks for several GPUs.
 * Each job only sleeps.
 */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned long long next_random(unsigned long long *state)
{
    *state = *state * 6364136223846793005ULL + 1442695040888963407ULL;
    return *state >> 33;
}

int main(int argc, char **argv)
{
    static const int gpus[] = {1, 1, 1, 2, 4};
    char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    long first = argc > 2 ? atol(argv[1]) : 0, count = argc > 2 ? atol(argv[2]) : 0;
    unsigned long long state = 12345 + (unsigned long long) first;

    slurm_init(NULL);
    for (long i = first; i < first + count; i++) {
        job_desc_msg_t job;
        submit_response_msg_t *answer = NULL;
        char gres[32];
        int tries = 0;

        slurm_init_job_desc_msg(&job);
        snprintf(gres, sizeof gres, "gres:gpu:%d", gpus[next_random(&state) % 5]);
        job.name = "bench";
        job.script = "#!/bin/sh\nexec sleep 100000\n";
        job.environment = environment;
        job.env_size = 1;
        job.user_id = geteuid();
        job.group_id = getegid();
        job.work_dir = "/";
        job.std_out = job.std_err = "/dev/null";
        job.min_nodes = job.max_nodes = 1;
        job.tres_per_node = gres;
        job.partition = next_random(&state) % 2 ? "rtx4090" : "rtx4090,rtx3080ti";
        while (slurm_submit_batch_job(&job, &answer) != SLURM_SUCCESS) {
            if (++tries == 100) {
                fprintf(stderr, "slurm_fill: job %ld: %s\n", i, slurm_strerror(errno));
                return 1;
            }
            usleep(50000);
        }
        slurm_free_submit_response_response_msg(answer);
    }
    return 0;
}
