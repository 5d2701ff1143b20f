package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"hermes-box-lite/internal/vm"
)

// A template is an image, called by its id.
const (
	templateRepo  = "localhost/hermes-box-template"
	templateLabel = "hermes-box.template"
)

// image is what `podman image ls --format json` says of one.
type image struct {
	ID         string `json:"Id"`
	Names      []string
	Labels     map[string]string
	Created    int64 // seconds since 1970
	Size       int64
	Containers int
}

func (d *Driver) images(ctx context.Context, filter string) ([]image, error) {
	out, err := d.run(ctx, "image", "ls", "--format", "json", "--filter", filter)
	if err != nil {
		return nil, err
	}
	var list []image
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("read the engine's answer about its images: %w", err)
	}
	return list, nil
}

// MakeTemplate implements vm.Cacher. An image of the same id that a container
// still uses loses its name, and goes with the last such container.
func (d *Driver) MakeTemplate(ctx context.Context, name, ownerID, id string) error {
	if !d.isPodman() {
		return fmt.Errorf("templates with %s: %w", d.engine, errors.ErrUnsupported)
	}
	if err := vm.CheckTemplateID(id); err != nil {
		return err
	}
	c, err := d.container(ctx, name)
	if err != nil {
		return err
	}
	if ownerID == "" || c.owner != ownerID {
		return fmt.Errorf("container %s: %w", prefix+name, vm.ErrNotOwner)
	}
	if _, err := d.run(ctx, "commit", "--quiet", "--change", "LABEL "+templateLabel+"="+id, c.id, templateRepo+":"+id); err != nil {
		return err
	}
	return d.pruneTemplates(ctx)
}

// pruneTemplates removes the images of templates that were replaced, unless a
// container still stands on them.
func (d *Driver) pruneTemplates(ctx context.Context) error {
	if !d.isPodman() {
		return nil
	}
	_, err := d.run(ctx, "image", "prune", "--force", "--filter", "label="+templateLabel)
	return err
}

// templateImage is the name of a template's image.
func (d *Driver) templateImage(ctx context.Context, id string) (string, error) {
	if err := vm.CheckTemplateID(id); err != nil {
		return "", err
	}
	list, err := d.images(ctx, "reference="+templateRepo+":"+id)
	if err != nil {
		return "", err
	}
	if len(list) == 0 {
		return "", fmt.Errorf("template %s: %w", id, vm.ErrNoTemplate)
	}
	return list[0].ID, nil
}

// Cached implements vm.Cacher.
func (d *Driver) Cached(ctx context.Context) ([]vm.Cached, error) {
	if !d.isPodman() {
		return nil, nil
	}
	kept, err := d.keptImages(ctx)
	var all []vm.Cached
	for id, img := range kept {
		all = append(all, vm.Cached{
			ID: id, Template: img.Labels[templateLabel] == id,
			Made: time.Unix(img.Created, 0).UTC(), Bytes: img.Size, InUse: img.Containers > 0,
		})
	}
	return all, err
}

// keptImages are the images that this driver has made, by the ids of templates
// and the digests of bases.
func (d *Driver) keptImages(ctx context.Context) (map[string]image, error) {
	kept := map[string]image{}
	for _, filter := range []string{"label=" + templateLabel, "reference=" + baseRepo} {
		list, err := d.images(ctx, filter)
		if err != nil {
			return nil, err
		}
		for _, img := range list {
			for _, name := range img.Names {
				if id, ok := strings.CutPrefix(name, templateRepo+":"); ok {
					kept[id] = img
				} else if id, ok := strings.CutPrefix(name, baseRepo+":"); ok {
					kept[id] = img
				}
			}
		}
	}
	return kept, nil
}

// Evict implements vm.Cacher.
func (d *Driver) Evict(ctx context.Context, id string) error {
	kept, err := d.keptImages(ctx)
	if err != nil {
		return err
	}
	img, ok := kept[id]
	if !ok {
		return fmt.Errorf("%s: %w", id, vm.ErrNoTemplate)
	}
	if img.Containers > 0 {
		return fmt.Errorf("image %s: %w", id, vm.ErrInUse)
	}
	// The engine refuses by itself when a container has come meanwhile.
	if _, err := d.run(ctx, "image", "rm", img.ID); err != nil {
		if strings.Contains(err.Error(), "in use") {
			err = fmt.Errorf("%w: %w", vm.ErrInUse, err)
		}
		return err
	}
	return nil
}
