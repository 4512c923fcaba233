/* Teaches a stock srun HyperPod's option --auto-resume=0|1, so that rendered files can be submitted as they are. */
#include <slurm/spank.h>
#include <string.h>

SPANK_PLUGIN(hpx_auto_resume, 1);

static int take(int val, const char *arg, int remote)
{
	return arg && (!strcmp(arg, "0") || !strcmp(arg, "1")) ? 0 : -1;
}

static struct spank_option option = {
	"auto-resume", "0|1", "accepted, and without effect here", 1, 0, (spank_opt_cb_f) take
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	return spank_option_register(sp, &option);
}
